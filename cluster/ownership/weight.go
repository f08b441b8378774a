package ownership

// MaxName is the length of the longest name of a node, in bytes.
const MaxName = 63

// LightChunk is the largest chunk of a Replicate that waits for no others: see Bulk.
const LightChunk = 4 << 10

// Bulk reports whether a message carries a part of a whole copy. All other messages overtake these: copies of many partitions take longer
// than a partition may stand still, or a lease lasts.
func Bulk(m Message) bool {
	r, ok := m.(*Replicate)
	return ok && len(r.Chunk) > LightChunk
}

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
	case *Replicate:
		return fixed + len(m.Chunk)
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
