"""The demo: the main job of each plugin, measured, in one table and one page."""
