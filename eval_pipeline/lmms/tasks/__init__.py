"""Empty: lmms-eval looks for tasks beside a plugin's models, and stops where there is no such folder."""
