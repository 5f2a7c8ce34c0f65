"""What a run leaves behind: its folder, its event log, its table."""
