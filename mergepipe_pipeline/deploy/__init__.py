"""The memory of a deployment: recipe files, the inbox, attempts, releases."""
