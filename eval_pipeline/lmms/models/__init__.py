"""The models of the plugin: by module in this folder, the name of its class."""

AVAILABLE_MODELS = {"budget_controller": "BudgetControllerModel"}
