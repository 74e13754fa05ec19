#!/bin/sh
# Starts Redis in a container of compose.yaml: users with the passwords of .env, data in /data. The users file is written
# anew at each start, from digests: `ACL SAVE` by hand does not last.
set -eu
umask 077
digest() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }
user() { # NAME PASSWORD RULES: off without a password
    if [ -n "$2" ]; then
        echo "user $1 on #$(digest "$2") $3"
    else
        echo "user $1 off $3"
    fi
}
[ -n "$REDIS_PASSWORD" ] || { echo "redis-start: REDIS_PASSWORD is empty" >&2; exit 2; }
folder=${REDIS_DIR:-/data}
{
    user default "$REDIS_PASSWORD" '~* &* +@all'
    user baton-submit "${REDIS_SUBMIT_PASSWORD:-}" 'resetkeys resetchannels ~{baton}:submit -@all +xadd'
    user baton-result "${REDIS_RESULT_PASSWORD:-}" \
        'resetkeys resetchannels ~{baton}:result:* ~{baton}:replies:* -@all +xread'
} >"$folder/users.acl"
[ "$(id -u)" != 0 ] || chown -R redis:redis "$folder"
set -- redis-server "${REDIS_CONF:-/etc/redis/redis.conf}" --dir "$folder" --aclfile "$folder/users.acl" \
    --bind '* -::*' --port "${REDIS_PORT:-6379}"
unset REDIS_PASSWORD REDIS_SUBMIT_PASSWORD REDIS_RESULT_PASSWORD
if [ "$(id -u)" = 0 ]; then
    for tool in su-exec gosu setpriv; do
        command -v "$tool" >/dev/null 2>&1 || continue
        [ "$tool" = setpriv ] || exec "$tool" redis "$@"
        exec setpriv --reuid redis --regid redis --clear-groups "$@"
    done
    echo "redis-start: neither setpriv, su-exec nor gosu: Redis would run as root" >&2
    exit 2
fi
exec "$@"
