"""One training, written for each launcher as its documentation would have it; model, data and steps
are the same.
"""
