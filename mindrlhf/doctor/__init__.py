"""Checks of `mindrlhf doctor`, and its trial of the devices."""
