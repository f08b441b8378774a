// Package prefetch has the processor fetch memory that is about to be read. A program that is going to look at many places that are in no
// cache, each found through the one before, names those of the first step for all, then those of the second, and so on: the processor
// fetches them side by side, where otherwise each would be waited for.
//
// It promises nothing: a processor may ignore it, and on some nothing is done. It reads nothing that a program can see, so that whatever
// may be named may also be written to meanwhile.
package prefetch
