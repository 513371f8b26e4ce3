"""``pdctl``: look into live engines, serve, proxy, replay. Built on typer and rich."""
