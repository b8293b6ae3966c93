"""Every metric by name, a file for each group of them: unit, meaning, and how the ranks' values become one."""
