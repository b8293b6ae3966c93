"""How a configuration changes what a vision-language model runs, for each architecture."""
