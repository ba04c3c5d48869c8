"""Parameters whose bytes come and go while their identity stays: the paged tensor, its doors, and the units they
form."""
