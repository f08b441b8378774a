// Package model explores an abstract model of the ownership protocol (hand-over, copies, grants) exhaustively: every
// state that can be reached within given bounds is visited, nearest first, and held to the promises. It holds nothing
// but tests. It shares no code with cluster/ownership, whose rules it states a second time, in the fewest words: the
// simulator finds where the code is not the protocol, this finds where the protocol is not what it promises.
//
// TestExhaust keeps all rules, expects that nothing breaks, and prints how many states there were. TestRules leaves
// out one rule at a time and expects that something breaks; with -v the shortest way there is printed as a trace. With
// -wide TestExhaust takes wider bounds, for some minutes.
//
// # What is modelled
//
// One partition; one to three nodes A, B, C, each process of a name told from the next by its boot (A, then A'); no,
// one or three voters. In the beginning A holds the partition at term 1.1, in half of the bounds with B as its backup.
//
//   - Messages: of nodes to each other and requests to voters are a set. Each may be received at any time after it was
//     sent, any number of times, or never; so they are lost, repeated, delayed, and overtake each other. One is taken
//     out of the set only when nothing can come of it. Replies of voters arrive at once or are lost, and with
//     LateReplies arrive late: a reply that arrives at once lets its receiver do all that a later one does. For the
//     same reason a request takes the place of an older one that says the same.
//   - Crashes: a node or a voter loses all it knows at any instant, and goes on as another process.
//   - Membership: where there are voters a node may believe at any time that another is gone, and claim. Without
//     voters less is promised, so verdicts are right there, one node crashes at a time, and the best copy claims.
//   - Time: ticks. A lease counts from the sending of its request and ends at the same tick as a voter's record that
//     was written in the instant of sending; clocks that differ in rate are in that worst case already, and a rule
//     that falls short of it by anything falls short by a tick.
//   - Contents: a holder's, a follower's, and those in messages are sets of admissions, with a number of units charged
//     without a name (escrow) and a mark that every key started full. A whole copy takes two messages, one for each of
//     two keys, or one step with AtomicCopies. A commit carries what has changed last.
//   - Voters: their records with term, holder, backup and the age of their word on it, the record that each replaced,
//     the time a record has to live, abstaining, reading one after the other, epochs.
//   - A forwarder with one answer.
//   - Loans: an admission that is lent is in its holder's content from then on. Once its borrower has been told, it
//     makes the admission at any instant, without asking, or never; then it is one that was acknowledged. Terms of
//     loans need not be modelled, since what ends is charged and so stays in the content; that it ends at the borrower
//     first is for when it counts until, which is not modelled.
//
// # What is promised
//
//   - At most one node holds a valid grant (without voters: the partition) at any instant.
//   - No term is granted to (without voters: held by) two processes.
//   - Whoever decides under a grant (without voters: holds the partition) has every admission that was ever
//     acknowledged in its content, by name or as a charge, or all its keys started full.
//   - No answer is used past its lease.
//
// That nothing is decided in a partition that is frozen, released or being claimed is built into the model, but for
// the rule freeze. That something happens at all is not promised; TestExhaust has a list of what must have happened
// somewhere.
//
// # What is not
//
// More than one partition; offers, refusals and repeated asking (only that a message can arrive again matters here);
// queries other than as "all of the nodes or none answer"; entrusting; merges after a split; admissions that expire,
// so that full means full for ever; policies other than strict ones where there are voters; five voters; hops. That
// every state within the bounds keeps the promises says nothing for certain about more nodes, claims, crashes or
// admissions.
package model
