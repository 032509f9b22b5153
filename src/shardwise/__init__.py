"""Predict, choose and run the best split of a convolutional network over a cluster."""
