"""Trace by example: forward runs on real tensors at several sizes, and its recordings become one program.

recording  one run of forward as a list of operations on data
size_fit   numbers as expressions of the sizes
simplify   forward writes to their readers, drop dead operations
find_loops, rows_of_loops, rolled_loops, loop_results, roll  loops over positions as one operation
recurrent_layers  recurrent layers of torch as loops
unify      recordings as one program for any size
rebuild    the program as a module that torch.export can trace
reads      numbers that Python reads out of tensors
tracked_numbers  numbers that note the values with which Python compares them
random_choices  random results of operations that choose among few
slices     slices that take everything
recording_inputs  inputs of any sizes, with padding or without
input_facts  the number of ids of an input, and the ids that may be padding
proof      compare the program with the module for other sizes and data
trace      choose sizes and data, record, and prove the program at a size that was not recorded
"""
