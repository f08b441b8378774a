package ownership

// MaxName is the length of the longest name of a node, in bytes.
const MaxName = 63

// Bulk reports whether a message is a part of a log. A receiver takes all other messages first: to take in copies of
// many partitions takes longer than a partition may stand still, or a lease lasts.
func Bulk(m Message) bool {
	_, ok := m.(*Block)
	return ok
}

// entryBytes is what an entry takes in memory, apart from its chunk.
const entryBytes = 64

// Weight estimates the bytes that a message takes in memory. It is at least its encoded length.
func Weight(m Message) int {
	const (
		item      = 128 + 2*MaxName // of a list, or the message without its lists and chunks
		refusal   = 96 + MaxName
		partition = 5 // in a list of just that
	)
	n := item
	switch m := m.(type) {
	case *Query:
		n += partition * len(m.Partitions)
	case *QueryReply:
		n += item * len(m.Infos)
	case *Block:
		for i := range m.Entries {
			n += entryBytes + len(m.Entries[i].Chunk)
		}
	case *BlockAck:
		n += refusal * len(m.Refusals)
	case *Commit:
		n += len(m.Chunk)
	case *GrantRequest:
		n += item * len(m.Items)
	case *GrantReply:
		n += item * len(m.Items)
	case *Records:
		n += item * len(m.Records)
	}
	return n
}
