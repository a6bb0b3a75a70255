"""What a policy costs a fleet: the machines of both sides under a virtual clock (`rolloutctl simulate`)."""
