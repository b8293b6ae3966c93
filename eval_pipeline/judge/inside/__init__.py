"""What runs beside or inside the sandboxes; standard library only, each file a plain script-level module there."""
