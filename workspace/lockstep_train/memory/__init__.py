"""What a rank needs of its device's memory, told before anything is loaded."""
