package keeper

import "github.com/weirlimit/weir/cluster/ownership"

const (
	// maxMail bounds what has arrived from other nodes and was not looked at yet, in each lane and as weight counts it.
	// Beyond it messages are lost, as they may be anywhere on their way.
	maxMail = 64 << 20
	// lightChunk is the largest chunk of a Replicate that is not kept waiting for others.
	lightChunk = 4 << 10
)

// mailbox holds messages that the core has not received. Taking in the content of partitions takes long: it is
// overtaken by everything else, for which checks, leases and answers may wait.
type mailbox struct {
	light, heavy lane
}

// lane is a queue of messages.
type lane struct {
	mail   []ownership.Envelope
	weight int
}

// add returns false when there is no room for the message.
func (m *mailbox) add(e ownership.Envelope) bool {
	l := &m.light
	if r, ok := e.Message.(*ownership.Replicate); ok && len(r.Chunk) > lightChunk {
		l = &m.heavy
	}
	w := weight(e.Message)
	if l.weight+w > maxMail {
		return false
	}
	l.mail = append(l.mail, e)
	l.weight += w
	return true
}

// take returns the next messages, most light ones and one of the others at most.
func (m *mailbox) take(most int) []ownership.Envelope {
	return m.heavy.pop(m.light.pop(nil, most), 1)
}

func (m *mailbox) empty() bool { return len(m.light.mail) == 0 && len(m.heavy.mail) == 0 }

// pop appends the oldest messages to a list.
func (l *lane) pop(to []ownership.Envelope, most int) []ownership.Envelope {
	n := min(len(l.mail), most)
	for _, e := range l.mail[:n] {
		l.weight -= weight(e.Message)
	}
	to = append(to, l.mail[:n]...)
	clear(l.mail[:n]) // the array may live on for long, the messages need not
	l.mail = l.mail[n:]
	return to
}

// weight is about the memory that a message takes.
func weight(m ownership.Message) int {
	const fixed, item = 256, 192
	switch m := m.(type) {
	case *ownership.Query:
		return fixed + 8*len(m.Partitions)
	case *ownership.QueryReply:
		return fixed + item*len(m.Infos)
	case *ownership.Replicate:
		return fixed + len(m.Chunk)
	case *ownership.Commit:
		return fixed + len(m.Chunk)
	case *ownership.GrantRequest:
		return fixed + item*len(m.Items)
	case *ownership.GrantReply:
		return fixed + item*len(m.Items)
	case *ownership.Records:
		return fixed + item*len(m.Records)
	}
	return fixed
}
