"""Servers under the load of many clients, for `serving.py` and `serving_soak.py`.

client      an HTTP client of little cost, which notes the time of each event of a stream
load        clients in closed loops, and arrivals by a Poisson process
workloads   models, their requests, and the bodies of these for each server
processes   processes of servers on a core of their own, with their processor time and memory
engine      the engine without a server, in a process of its own
floor       a server that computes nothing: the cost of the client
machine     the processor, and its load
"""
