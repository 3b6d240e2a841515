"""The commands that show, explain and remove what is compiled."""
