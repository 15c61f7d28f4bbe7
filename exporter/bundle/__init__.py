"""The bundle: the folder that one stage hands to the next, and the files in it."""
