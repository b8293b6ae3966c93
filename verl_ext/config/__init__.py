"""From a recipe and a command line to one resolved configuration, checked before anything heavy is imported."""
