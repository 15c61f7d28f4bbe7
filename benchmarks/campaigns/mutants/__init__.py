"""Mutants: faults planted by the hundred into what this project checks, and a count of those that pass.

drafts            one graph with its data, opened for changes and written back with checksums that fit
good_units        the good bundles that mutants are made from
operator_faults   every node, input, attribute and constant of a graph, changed without knowledge of its meaning
decoder_faults    faults that exporters of decoders have made
weight_faults     changes of the stored weights, integers, scales, zero points and tables
network_faults    changes of the network that TensorRT parses
twin_oracle       whether a mutant computes something else: its float32 twin against the good one's
trials_of_graphs  makes one mutant of a graph, asks the oracle, and asks the check under trial
trials_of_networks  the same for the network of a graph
trials_of_records   the same for engine records and profiles, with their faults
mutant_campaign   chooses the mutants of a run from a seed, and counts
"""
