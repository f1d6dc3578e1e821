"""The configuration: its keys, the sources that it is read from, and the settings for one model."""
