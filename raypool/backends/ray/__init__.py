"""The backend on Ray: worker processes, the resources that they claim, and the nodes that they run
on.
"""
