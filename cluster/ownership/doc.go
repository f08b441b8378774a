// Package ownership is the place of the protocol that says who may decide for a partition.
//
// The ring says who should own a partition; views of the ring may differ for a while. What decides is a token
// (partition, term, holder, boot), held by one process at a time, moved by its holder, and claimed anew at a higher
// term when a holder is lost. That protocol (tokens, hand-over, replication, leases, healing) is a pure state machine
// and will live here; package cluster tells it who is a member, package limiter asks it before it decides.
//
// Today every node takes the ring's word: all decisions are made, and all forwards are sent, under the zero Term, and
// two nodes whose views differ may both decide for one partition until the views agree.
package ownership
