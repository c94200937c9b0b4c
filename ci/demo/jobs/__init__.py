"""One module a plugin: its main job on embedded data, without the plugin and with it."""
