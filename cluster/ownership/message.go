package ownership

import "time"

// This file has the messages that the Cores of two processes send each other, in this order: of claims (claim.go), of
// moves (move.go), of copies (log.go, follow.go), the Commit that ends a move, and of grants (grant.go, vote.go).
//
// Words: The Term of a message is the sender's for the partition, unless its field says otherwise. Position is how new
// a copy is. Attachment numbers a follower of a holder (follow.go).
//
// Other files must keep: rpc/replica encodes every field; Weight (weight.go) counts every slice.

// Node is a process: a ring name, and a boot id that differs at each start. The zero Node is no process.
type Node struct {
	Name string
	Boot uint64
}

// Message is what the Cores of two processes send each other. Messages may be lost, repeated and reordered; a Core
// repeats those that must arrive. The slices of a Message do not change after it has been sent.
type Message interface{ message() }

// Envelope is a Message on its way.
type Envelope struct {
	From, To Node
	Message  Message
}

// Query asks a member what it knows of partitions. The sender is about to claim them, or is leaving (leave.go).
type Query struct {
	ID         uint64
	Partitions []int
}

// QueryReply answers a Query, in its order. With ID 0 it answers no Query, and lists partitions that the sender holds.
type QueryReply struct {
	ID    uint64
	Infos []Info
}

// Info is what a node knows of a partition.
type Info struct {
	Partition int
	Held      bool     // by the sender, under Term
	Claiming  bool     // the sender is about to claim it as well, or waits for members whose disks may have it
	Term      Term     // with Held the sender's; otherwise the highest known to have been held
	Holder    Node     // the holder under Term, if it is alive; may be the zero Node
	Copy      Position // of the sender's complete copy, with Held of that on its disk; zero: none
}

// Position says how new a copy is: the term under which its holder last changed it, and the attachment by which the
// holder sent it.
type Position struct {
	Term       Term
	Attachment uint64
}

// Entrust asks the node with the newest copy of a partition without a holder to claim the partition.
type Entrust struct {
	Partition int
	Term      Term // the highest known to have been held
}

// Offer asks a node whether it accepts a move of a partition.
type Offer struct {
	Partition int
	Term      Term // the sender's
}

// Verdict answers an Offer.
type Verdict uint8

// The verdicts.
const (
	Accepted Verdict = 1 // the giver is to send the partition
	Merging  Verdict = 2 // the same; the receiver holds the partition too, and merges
	Refused  Verdict = 3 // the giver is to offer again later: the receiver is busy, leaving, or sees another ring
)

// OfferReply answers an Offer.
type OfferReply struct {
	Partition int
	Term      Term // of the Offer
	Verdict   Verdict
}

// Block is a part of the log from one process to another. The log carries the changes of all copies that the sender
// keeps at the receiver.
type Block struct {
	Log      uint64 // the log's number, which rises with each log of the sender; a later log replaces an earlier one
	Position uint64 // 1 for the first block of a log, then one above the block before
	Heard    uint64 // the sender knows the refusals up to this position
	Entries  []Entry
	Sum      uint32 // CRC-32C of the chunks
}

// Entry changes one copy.
type Entry struct {
	Partition int
	Term      Term
	// Attachment numbers the sender's attachments of followers: no two of a partition and a sender share a number.
	Attachment uint64
	Begin      bool // the entry is of an attachment's first chunk: a whole copy begins, staged until Complete
	Complete   bool // the whole copy ends with this entry
	More       bool // the chunk goes on in the next entry of the log
	Join       bool // the copy was restored from the sender's disk; the receiver joins it with its content
	Origin     Term // with Begin: the term that the history of the content began with
	Chunk      []byte
}

// BlockAck answers a Block: all entries of the log up to a position are taken in, except those that are refused.
type BlockAck struct {
	Log      uint64
	Position uint64
	Lost     bool      // the receiver has forgotten the log; the sender is to begin all copies anew, in another log
	Refusals []Refusal // all that the log's sender has not said it knows (Block.Heard)
}

// Refusal says that an entry was not taken in. It ends the entry's attachment.
type Refusal struct {
	Position   uint64 // of the entry's block
	Partition  int
	Attachment uint64
	Outcome    Outcome // not Done
	Known      Term    // with Superseded the higher term, with Conflict the receiver's
	Holder     Node    // the holder under Known
}

// Outcome answers an Entry or a Commit.
type Outcome uint8

// The outcomes.
const (
	Done       Outcome = 1
	Again      Outcome = 2 // the copy has a gap or is damaged; the sender is to begin it anew
	Superseded Outcome = 3 // a higher term is known; with Join, the receiver's content has the copy's origin
	Conflict   Outcome = 4 // the receiver holds the partition, or has a restored copy; with Join, it cannot join now
	Full       Outcome = 5 // the receiver has no memory for the copy; the sender is to begin it anew later
)

// Commit hands a partition over. The sender has stopped deciding, and gives up its present term. The receiver holds the
// partition under a higher term from the moment it takes this message, and proves to voters with the message's sender
// and term that the term is given up (Release). The sender repeats it until it is answered.
type Commit struct {
	Partition  int
	Term       Term
	Attachment uint64 // of the receiver's copy
	Chunk      []byte // the last changes
	Sum        uint32 // CRC-32C of Chunk
	Known      Term   // the highest term that the sender knows
	Merge      bool   // the receiver has answered Merging
	Granted    bool   // the sender's content is whole for strict rules (grant.go)
}

// CommitAck answers a Commit.
type CommitAck struct {
	Partition  int
	Term       Term // of the Commit
	Outcome    Outcome
	New        Term   // with Done: the receiver's term
	Keep       bool   // with Done: the giver is the receiver's backup, and its content becomes its copy
	Attachment uint64 // with Keep: of that copy
	Known      Term   // with Superseded the higher term, with Conflict the receiver's
}

// Forget tells a follower to drop its copy.
type Forget struct {
	Partition int
	Term      Term // of the holder
}

// GrantRequest asks a voter to record, or go on recording, the sender as the holder of partitions.
type GrantRequest struct {
	ID    uint64
	Items []GrantItem
}

// GrantItem is one partition of a GrantRequest.
type GrantItem struct {
	Partition int
	Term      Term
	Backup    Node    // the backup that the sender's answers wait for; the zero Node: they do not wait
	Release   Release // the term that the process of the present record has given up; zero: none
}

// Release proves that a process has given up a term.
type Release struct {
	Node Node
	Term Term
}

// GrantReply answers a GrantRequest, in its order.
type GrantReply struct {
	ID    uint64
	Epoch uint64 // the lowest that the voter records
	Items []GrantAnswer
}

// GrantAnswer is a voter's answer for one partition.
type GrantAnswer struct {
	Partition int
	Term      Term
	Granted   bool
	// Of a refusal, Recorded is the record that stands against the request, and Wait is how long it still stands. Of a
	// grant, Recorded is the record of another process that the holder's record has replaced; the zero Record: none.
	// Every grant repeats it.
	Recorded Record
	Wait     time.Duration
}

// Record is what a voter has recorded for a partition.
type Record struct {
	Partition int
	Term      Term
	Node      Node
	Backup    Node
	ID        uint64 // of the request that wrote it. An older request of the same process and term does not replace it
}

// ReadRecords asks a voter for all its records. A restarted voter sends it.
type ReadRecords struct{ ID uint64 }

// Records answers ReadRecords.
type Records struct {
	ID      uint64
	Read    bool // the sender has ended its own reading (vote.go); otherwise it has no records
	Epoch   uint64
	Fresh   bool     // the sender began its epoch when the receiver was there already
	Records []Record // of each partition the record, and the record of another process that it has replaced
}

func (*Query) message()        {}
func (*QueryReply) message()   {}
func (*Entrust) message()      {}
func (*Offer) message()        {}
func (*OfferReply) message()   {}
func (*Block) message()        {}
func (*BlockAck) message()     {}
func (*Commit) message()       {}
func (*CommitAck) message()    {}
func (*Forget) message()       {}
func (*GrantRequest) message() {}
func (*GrantReply) message()   {}
func (*ReadRecords) message()  {}
func (*Records) message()      {}
