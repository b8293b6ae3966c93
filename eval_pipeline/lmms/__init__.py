"""Plugin of lmms-eval with the model `budget_controller`; use it by `LMMS_EVAL_PLUGINS=eval_pipeline.lmms`."""
