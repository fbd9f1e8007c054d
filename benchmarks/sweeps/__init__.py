"""One sweep, written for each system as its documentation would have it; the training is the
same.
"""
