"""What the user passes to `attribute`, in all its forms: checked, and brought into one form."""
