"""Files and folders on disk: locked, private to one user, and written so that a reader never sees a part."""
