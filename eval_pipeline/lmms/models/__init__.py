"""The models that lmms-eval finds here: for each the module in this folder, and the name of its class."""

AVAILABLE_MODELS = {"budget_controller": "BudgetControllerModel"}
