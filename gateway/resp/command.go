package resp

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/weirlimit/weir/auth"
)

// This file has the commands. specs lists them; command finds one and do authenticates and runs it. check.go has the
// commands that are decided by the Service.

// spec describes a command.
type spec struct {
	name    string
	arity   int // number of arguments with the name; negative: at least so many; 0: run checks it
	open    bool
	keys    [3]int // first, last and step, as in COMMAND's answer
	args    string // for COMMAND DOCS
	summary string
	run     func(c *conn, s *scratch, args []string) // answers the command, or queues a check
	// run queues a check, or answers by failed; queued checks stay queued before run
	decided bool
}

// redisVersion is the version of Redis in HELLO and INFO. Clients use it to find out which commands they may send.
const redisVersion = "7.2.0"

// specs returns all commands.
func specs() []spec {
	return []spec{
		{name: "cl.throttle", keys: [3]int{1, 1, 1}, decided: true, run: (*conn).throttled,
			args:    "key max_burst count period [quantity]",
			summary: "Asks for quantity units of a token bucket, as redis-cell does"},
		{name: "weir.check", arity: -3, keys: [3]int{2, 2, 1}, decided: true, run: (*conn).check,
			args: "policy key [cost]", summary: "Asks for cost units of a key under a policy"},
		{name: "weir.peek", arity: 3, keys: [3]int{2, 2, 1}, decided: true, run: (*conn).peek,
			args: "policy key", summary: "Tells what a check of a key under a policy would be answered, and charges nothing"},
		{name: "auth", arity: -2, open: true, run: (*conn).authCommand, args: "[username] password",
			summary: "Authenticates the connection"},
		{name: "hello", arity: -1, open: true, run: (*conn).hello,
			args:    "[protover [AUTH username password] [SETNAME name]]",
			summary: "Sets the protocol's version, and tells about the server"},
		{name: "ping", arity: -1, open: true, run: (*conn).ping, args: "[message]",
			summary: "Answers PONG, or the message"},
		{name: "quit", arity: -1, open: true, run: (*conn).quit, summary: "Closes the connection"},
		{name: "reset", arity: 1, open: true, run: (*conn).reset, summary: "Makes the connection as new"},
		{name: "echo", arity: 2, run: (*conn).echo, args: "message", summary: "Answers the message"},
		{name: "select", arity: 2, run: (*conn).selectCommand, args: "index",
			summary: "Chooses the database, of which there is number 0"},
		{name: "client", arity: -2, run: (*conn).client,
			args:    "ID | INFO | GETNAME | SETNAME name | SETINFO attribute value",
			summary: "Tells or sets what is known of the connection"},
		{name: "command", arity: -1, run: (*conn).commandCommand,
			args: "[COUNT | LIST | DOCS [name ...] | INFO [name ...]]", summary: "Tells about the commands"},
		{name: "info", arity: -1, run: (*conn).info, args: "[section ...]", summary: "Tells about the server"},
	}
}

// find returns the command with a name in any case, or nil. It looks at 16 bytes: all names are shorter.
func (s *Server) find(name string) *spec { return s.commands[strings.ToLower(shortened(name, 16))] }

// command runs a command.
func (c *conn) command(s *scratch, args []string) {
	if c.ctx != nil {
		c.early = 0
	} else if c.early++; c.early > maxEarly {
		c.failed(s, "NOAUTH", "too many commands before authentication")
		c.ending = true
		return
	}
	if s.last.command == nil || args[0] != s.last.name {
		s.last.name, s.last.command = args[0], c.server.find(args[0])
	}
	if known := s.last.command; known != nil {
		c.do(s, known, args)
		return
	}
	if strings.EqualFold(args[0], "post") || strings.EqualFold(args[0], "host:") {
		// A web page has a browser send a request to this port, the body of which could be commands.
		c.server.cfg.Suspicious(c.raw.RemoteAddr())
		c.ending = true
		return
	}
	c.failed(s, "ERR", "unknown command '"+shortened(args[0],
		128)+"', with args beginning with: "+argsBeginning(args[1:]))
}

// do runs a known command.
func (c *conn) do(s *scratch, command *spec, args []string) {
	if n := len(args); command.arity > 0 && n != command.arity || n < -command.arity {
		c.wrongArity(s, command.name)
		return
	}
	// A decided command of an authenticated connection is authorized with its check, so that Current need not be
	// called.
	if !command.open && (c.ctx == nil || !command.decided) && !c.isAuthenticated() {
		c.failed(s, "NOAUTH", "Authentication required.")
		return
	}
	if command.decided {
		command.run(c, s, args)
		return
	}
	c.flush(s)
	command.run(c, s, args)
}

func (c *conn) wrongArity(s *scratch, name string) {
	c.failed(s, "ERR", "wrong number of arguments for '"+name+"' command")
}

func (c *conn) ok(s *scratch) { s.out = append(s.out, "+OK\r\n"...) }

func (c *conn) ping(s *scratch, args []string) {
	switch len(args) {
	case 1:
		s.out = append(s.out, "+PONG\r\n"...)
	case 2:
		s.out = appendBulk(s.out, args[1])
	default:
		c.fail(s, "ERR", "wrong number of arguments for 'ping' command")
	}
}

func (c *conn) echo(s *scratch, args []string) { s.out = appendBulk(s.out, args[1]) }

func (c *conn) quit(s *scratch, _ []string) {
	c.ok(s)
	c.ending = true
}

func (c *conn) reset(s *scratch, _ []string) {
	c.ctx, c.tried, c.proto, c.name = nil, false, resp2, ""
	c.credentials.Authorization = nil
	c.arrive()
	s.out = appendSimple(s.out, "RESET")
}

func (c *conn) selectCommand(s *scratch, args []string) {
	switch n, err := strconv.ParseInt(args[1], 10, 32); {
	case err != nil:
		c.fail(s, "ERR", "value is not an integer or out of range")
	case n != 0:
		c.fail(s, "ERR", "DB index is out of range")
	default:
		c.ok(s)
	}
}

func (c *conn) authCommand(s *scratch, args []string) {
	user := defaultUser
	if len(args) > 2 {
		user = args[1]
	}
	switch {
	case len(args) > 3:
		c.fail(s, "ERR", "syntax error")
	case len(args) == 2 && !c.server.cfg.Tokens:
		c.fail(s, "ERR", "AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?")
	case c.authenticate(s, user, args[len(args)-1]):
		c.ok(s)
	}
}

// defaultUser is the user name that any caller may give, because the token identifies the caller.
const defaultUser = "default"

// authenticate authenticates the caller by a token. user must be the token's name or defaultUser. It returns false when
// it has answered with an error; an earlier authentication then stays.
func (c *conn) authenticate(s *scratch, user, token string) bool {
	credentials := c.credentials
	if c.server.cfg.Tokens {
		credentials.Authorization = []string{"Bearer " + token}
	}
	ctx, denial := c.server.cfg.Authenticate(context.Background(), credentials)
	if denial != nil || user != defaultUser && (!c.server.cfg.Tokens || user != auth.CallerName(ctx)) {
		c.fail(s, "WRONGPASS", "invalid username-password pair or user is disabled.")
		return false
	}
	if !c.enter(ctx) {
		c.fail(s, "ERR", "max number of clients reached")
		return false
	}
	c.credentials = credentials
	return true
}

// hello carries out HELLO [protover [AUTH username password] [SETNAME name]].
func (c *conn) hello(s *scratch, args []string) {
	proto, name := c.proto, c.name
	var user, token string
	login := false
	if len(args) > 1 {
		switch n, err := strconv.ParseInt(args[1], 10, 64); {
		case err != nil:
			c.fail(s, "ERR", "Protocol version is not an integer or out of range")
			return
		case n != resp2 && n != resp3:
			c.fail(s, "NOPROTO", "unsupported protocol version")
			return
		default:
			proto = int(n)
		}
		for rest := args[2:]; len(rest) > 0; {
			switch option := strings.ToLower(shortened(rest[0], 16)); {
			case option == "auth" && len(rest) > 2:
				user, token, login = rest[1], rest[2], true
				rest = rest[3:]
			case option == "setname" && len(rest) > 1:
				name, rest = rest[1], rest[2:]
			default:
				c.fail(s, "ERR", "Syntax error in HELLO option '"+shortened(rest[0], 128)+"'")
				return
			}
		}
	}
	if !c.plainName(s, name) || login && !c.authenticate(s, user, token) {
		return
	}
	if !c.isAuthenticated() {
		c.fail(s, "NOAUTH", "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time")
		return
	}
	c.proto, c.name = proto, strings.Clone(name) // so that the round's text is not kept
	b := appendMap(s.out, proto, 7)
	b = appendBulk(appendBulk(b, "server"), "redis") // some clients require this name
	b = appendBulk(appendBulk(b, "version"), redisVersion)
	b = appendInt(appendBulk(b, "proto"), int64(proto))
	b = appendInt(appendBulk(b, "id"), c.id)
	b = appendBulk(appendBulk(b, "mode"), "standalone")
	b = appendBulk(appendBulk(b, "role"), "master")
	s.out = appendArray(appendBulk(b, "modules"), 0)
}

// maxName bounds the name of a connection, of a library and of its version, in bytes.
const maxName = 128

// plainName says whether a connection may have a name. It returns false when it has answered with an error.
func (c *conn) plainName(s *scratch, name string) bool {
	if !isPlain(name) {
		c.fail(s, "ERR", "Client names cannot contain spaces, newlines or special characters.")
		return false
	}
	return true
}

// isPlain says whether a text is allowed as a name or version of a client.
func isPlain(s string) bool {
	return len(s) <= maxName && strings.IndexFunc(s, func(r rune) bool { return r < '!' || r > '~' }) < 0
}

func (c *conn) client(s *scratch, args []string) {
	what := strings.ToLower(shortened(args[1], 16))
	switch {
	case what == "id" && len(args) == 2:
		s.out = appendInt(s.out, c.id)
	case what == "getname" && len(args) == 2 && c.name == "":
		s.out = appendNull(s.out, c.proto)
	case what == "getname" && len(args) == 2:
		s.out = appendBulk(s.out, c.name)
	case what == "setname" && len(args) == 3:
		if c.plainName(s, args[2]) {
			c.name = strings.Clone(args[2])
			c.ok(s)
		}
	case what == "setinfo" && len(args) == 4:
		c.setInfo(s, args[2], args[3])
	case what == "info" && len(args) == 2:
		s.out = appendBulk(s.out,
			fmt.Sprintf("id=%d addr=%s laddr=%s name=%s age=%d db=0 resp=%d lib-name=%s lib-ver=%s user=%s\n",
				c.id, c.raw.RemoteAddr(), c.raw.LocalAddr(), c.name, int64(time.Since(c.came)/time.Second), c.proto,
				c.libName, c.libVersion, auth.CallerName(c.ctx)))
	case what == "id" || what == "getname" || what == "setname" || what == "setinfo" || what == "info":
		c.fail(s, "ERR", "wrong number of arguments for 'client|"+what+"' command")
	default:
		c.unknownSubcommand(s, "CLIENT", args[1])
	}
}

func (c *conn) setInfo(s *scratch, attribute, value string) {
	name := strings.ToLower(shortened(attribute, 16))
	to := map[string]*string{"lib-name": &c.libName, "lib-ver": &c.libVersion}[name]
	switch {
	case to == nil:
		c.fail(s, "ERR", "Unrecognized option '"+shortened(attribute, 64)+"'")
	case !isPlain(value):
		c.fail(s, "ERR", name+" cannot contain spaces, newlines or special characters.")
	default:
		*to = strings.Clone(value)
		c.ok(s)
	}
}

func (c *conn) unknownSubcommand(s *scratch, command, what string) {
	c.fail(s, "ERR", "unknown subcommand '"+shortened(what, 128)+"'. Try "+command+" HELP.")
}

// named returns the commands with some names, nil for an unknown name; without names, all commands.
func (c *conn) named(names []string) []*spec {
	var list []*spec
	if len(names) == 0 {
		for _, one := range specs() {
			list = append(list, c.server.commands[one.name])
		}
	}
	for _, name := range names {
		list = append(list, c.server.find(name))
	}
	return list
}

func (c *conn) commandCommand(s *scratch, args []string) {
	what := "info"
	var names []string
	if len(args) > 1 {
		what, names = strings.ToLower(shortened(args[1], 16)), args[2:]
	}
	switch {
	case what == "count" && len(names) == 0:
		s.out = appendInt(s.out, int64(len(c.server.commands)))
	case what == "list" && len(names) == 0:
		list := c.named(nil)
		s.out = appendArray(s.out, len(list))
		for _, one := range list {
			s.out = appendBulk(s.out, one.name)
		}
	case what == "info":
		list := c.named(names)
		s.out = appendArray(s.out, len(list))
		for _, one := range list {
			s.out = appendInfo(s.out, c.proto, one)
		}
	case what == "docs":
		var list []*spec
		for _, one := range c.named(names) {
			if one != nil {
				list = append(list, one)
			}
		}
		s.out = appendMap(s.out, c.proto, len(list))
		for _, one := range list {
			s.out = appendDocs(appendBulk(s.out, one.name), c.proto, one)
		}
	case what == "count" || what == "list":
		c.fail(s, "ERR", "wrong number of arguments for 'command|"+what+"' command")
	default:
		c.unknownSubcommand(s, "COMMAND", args[1])
	}
}

// appendInfo appends the entry of a command in COMMAND INFO; nil: an unknown command.
func appendInfo(b []byte, proto int, one *spec) []byte {
	if one == nil {
		return appendNull(b, proto)
	}
	b = appendInt(appendBulk(appendArray(b, 10), one.name), int64(cmp.Or(one.arity, -1)))
	flags := []string{"fast"}
	if one.open {
		flags = append(flags, "no_auth")
	}
	if one.decided {
		flags = append(flags, "write")
	}
	b = appendSet(b, proto, len(flags))
	for _, f := range flags {
		b = appendSimple(b, f)
	}
	for _, n := range one.keys {
		b = appendInt(b, int64(n))
	}
	b = appendSet(b, proto, 0)                               // ACL categories
	return appendArray(appendArray(appendArray(b, 0), 0), 0) // hints, key specifications, subcommands
}

// appendDocs appends the entry of a command in COMMAND DOCS.
func appendDocs(b []byte, proto int, one *spec) []byte {
	b = appendMap(b, proto, 4)
	b = appendBulk(appendBulk(b, "summary"), one.summary)
	b = appendBulk(appendBulk(b, "since"), "1.0.0")
	b = appendBulk(appendBulk(b, "group"), "connection")
	if one.args == "" {
		return appendArray(appendBulk(b, "arguments"), 0)
	}
	// One argument stands for all, because clients show only its text.
	b = appendMap(appendArray(appendBulk(b, "arguments"), 1), proto, 3)
	b = appendBulk(appendBulk(b, "name"), one.args)
	b = appendBulk(appendBulk(b, "type"), "string")
	return appendBulk(appendBulk(b, "display_text"), one.args)
}

func (c *conn) info(s *scratch, _ []string) {
	s.out = appendBulk(s.out,
		fmt.Sprintf("# Server\r\nredis_version:%s\r\nweir_version:%s\r\nredis_mode:standalone\r\nuptime_in_seconds:%d\r\n\r\n# Clients\r\nconnected_clients:%d\r\n\r\n# Replication\r\nrole:master\r\n",
			redisVersion, c.server.cfg.Version, int64(time.Since(c.server.began)/time.Second), c.server.connections()))
}
