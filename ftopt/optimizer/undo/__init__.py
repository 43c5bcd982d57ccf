"""Taking the last step of an optimizer back."""
