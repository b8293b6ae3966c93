"""A controller with its model inside lmms-eval, to which `LMMS_EVAL_PLUGINS=eval_pipeline.lmms` makes it known."""
