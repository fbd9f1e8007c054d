"""Workers on Ray: their processes, the resources that they claim, and the machines that they are on."""
