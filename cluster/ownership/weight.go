package ownership

// MaxName is the length of the longest name of a node, in bytes.
const MaxName = 63

// Bulk reports whether a message is a part of a log. A receiver takes all other messages first: to take in copies of many partitions
// takes longer than a partition may stand still, or a lease lasts.
func Bulk(m Message) bool {
	_, ok := m.(*Block)
	return ok
}

// What an entry and a refusal take on their way, apart from a chunk and a name.
const (
	entryBytes   = 64
	refusalBytes = 96
)

// Weight estimates the bytes that a message takes in memory. It is at least its encoded length.
func Weight(m Message) int {
	const (
		fixed     = 128         // what is not in a list or a chunk, names of nodes left out
		item      = 128         // an item of a list, names of nodes left out
		partition = 5           // a partition in a list of just that
		names     = 2 * MaxName // of a message or an item
	)
	switch m := m.(type) {
	case *Query:
		return fixed + partition*len(m.Partitions)
	case *QueryReply:
		return fixed + (item+names)*len(m.Infos)
	case *Block:
		n := fixed
		for i := range m.Entries {
			n += entryBytes + len(m.Entries[i].Chunk)
		}
		return n
	case *BlockAck:
		n := fixed
		for i := range m.Refusals {
			n += refusalBytes + len(m.Refusals[i].Holder.Name)
		}
		return n
	case *Commit:
		return fixed + names + len(m.Chunk)
	case *GrantRequest:
		return fixed + (item+names)*len(m.Items)
	case *GrantReply:
		return fixed + (item+names)*len(m.Items)
	case *Records:
		return fixed + (item+names)*len(m.Records)
	}
	return fixed + names
}
