"""The backend on Ray: worker processes, their resources, and the nodes that they run on."""
