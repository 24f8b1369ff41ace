"""The commands of `fata`, one file each."""
