"""What a deployment watches and remembers: recipe files, the inbox, attempts, releases."""
