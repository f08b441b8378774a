package keeper

import "github.com/weirlimit/weir/cluster/ownership"

const (
	// maxMail bounds what has arrived from other nodes and was not looked at yet, in each lane and as weight counts it.
	// Beyond it messages are lost, as they may be anywhere on their way.
	maxMail = 64 << 20
	// lightChunk is the largest chunk of a Replicate that is not kept waiting for others.
	lightChunk = 4 << 10
	// maxKept is for how many messages an empty lane keeps room.
	maxKept = 4096
)

// mailbox holds messages that the core has not received. Taking in the content of partitions takes long: it is
// overtaken by everything else, for which checks, leases and answers may wait.
type mailbox struct {
	light, heavy lane
}

// lane is a queue of messages.
type lane struct {
	mail   []ownership.Envelope // from head on
	head   int
	weight int
}

func (l *lane) len() int { return len(l.mail) - l.head }

// add returns false when there is no room for the message.
func (m *mailbox) add(e *ownership.Envelope) bool {
	l := &m.light
	if r, ok := e.Message.(*ownership.Replicate); ok && len(r.Chunk) > lightChunk {
		l = &m.heavy
	}
	w := weight(e.Message)
	if l.weight+w > maxMail {
		return false
	}
	l.push(e)
	l.weight += w
	return true
}

// take appends the next messages to a list, most light ones and one of the others at most.
func (m *mailbox) take(to []ownership.Envelope, most int) []ownership.Envelope {
	return m.heavy.pop(m.light.pop(to, most), 1)
}

func (m *mailbox) empty() bool { return m.light.len()+m.heavy.len() == 0 }

// push appends a message, where the oldest were if there is no room behind the newest.
func (l *lane) push(e *ownership.Envelope) {
	if len(l.mail) == cap(l.mail) && l.head > len(l.mail)/2 {
		n := copy(l.mail, l.mail[l.head:])
		clear(l.mail[n:])
		l.mail, l.head = l.mail[:n], 0
	}
	l.mail = append(l.mail, *e)
}

// pop appends the oldest messages to a list.
func (l *lane) pop(to []ownership.Envelope, most int) []ownership.Envelope {
	next := l.mail[l.head:][:min(l.len(), most)]
	for i := range next {
		l.weight -= weight(next[i].Message)
	}
	to = append(to, next...)
	clear(next) // the array lives on, the messages need not
	if l.head += len(next); l.head == len(l.mail) {
		l.mail, l.head = l.mail[:0], 0
		if cap(l.mail) > maxKept {
			l.mail = nil
		}
	}
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
