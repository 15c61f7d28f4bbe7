"""Kills, full disks, hostile input and soaks."""
