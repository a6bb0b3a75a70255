"""The gateway: one base URL for each replica, for trainers that post to their engines."""
