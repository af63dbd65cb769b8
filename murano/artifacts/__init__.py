"""What a step leaves behind, and how it is saved and opened again."""
