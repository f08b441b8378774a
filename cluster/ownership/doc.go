// Package ownership is the protocol that says who may decide for a partition, as a pure state machine: SetView, Receive
// and Tick in; messages, routes and confirmations out. It has no goroutine, clock or socket, so that a simulator runs
// the same code as a node, whose shell is package runner.
//
// The ring says who should own a partition; views of the ring may differ for a while. What decides is a token
// (partition, term, process), held by one process at a time, moved by its holder, and claimed anew at a higher term
// when a holder is lost. A holder has its content copied to a backup, which goes on from there. Under strict rules a
// holder decides only while a majority of fixed voters has it on record. DESIGN.md says what each rule is for.
//
// What it does not promise: one holder at a time where a process is declared dead and lives, as in a split (such
// holders find each other and merge; strict policies decide under grants, of which there is one at a time); or content
// whose holder and copy are both lost.
package ownership
