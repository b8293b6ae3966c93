"""The models of the plugin: the class name by module in this folder."""

AVAILABLE_MODELS = {"budget_controller": "BudgetControllerModel"}
