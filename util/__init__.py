"""Leaves of the code base: nothing in here knows about PR-MIM or imports anything outside `util`."""
