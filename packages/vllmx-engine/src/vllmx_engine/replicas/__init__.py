"""Replicas: several engine cores of one model behind one frontend, and the choice among them."""
