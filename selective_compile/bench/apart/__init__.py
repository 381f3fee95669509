"""What runs in the virtual environments of other engines: plain scripts, which import nothing of this package."""
