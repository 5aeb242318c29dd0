"""What models, programs and scripts share: nothing in here imports anything of the project outside `util`."""
