"""The bundle: the folder that one stage passes to the next, and the files in it."""
