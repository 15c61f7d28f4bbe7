"""Mutants: faults planted by the hundred into what this project checks, and a count of those that pass.

drafts            one graph with its data, opened for changes and written back with checksums that fit
good_units        the good bundles that mutants are made from
operator_faults   every node, input, attribute and constant of a graph, changed without knowledge of its meaning
decoder_faults    faults that exporters of decoders have made
weight_faults     changes of the stored weights, integers, scales, zero points and tables
network_faults    changes of the network that TensorRT parses
record_faults     changes of engine records, and profiles that contradict themselves
twin_oracle       whether a mutant computes something else: its float32 twin against the good one's
trials            makes one mutant, asks the oracle, and asks the check under trial
mutant_campaign   chooses the mutants of a run from a seed, and counts
"""
